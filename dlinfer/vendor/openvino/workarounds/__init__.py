"""Workarounds for models that OpenVINO's CPU plugin compiles wrongly."""
