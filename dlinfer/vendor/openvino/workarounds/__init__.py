"""What OpenVINO's CPU plugin compiles wrongly, and how a model is written so that it does not."""
