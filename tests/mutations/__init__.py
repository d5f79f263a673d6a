"""Faults put into a copy of the tree, which tests of the gate have to catch; ``make mutations`` tries each."""
