"""Write a report to a file: JSON for programs, JUnit for CI, HTML for people."""
