"""Passes for OpenVINO's graphs, and the ops that they insert."""
