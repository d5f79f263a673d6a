"""A report as files: JSON for programs, JUnit for CI, HTML for people."""
