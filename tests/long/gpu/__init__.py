"""Tests of a machine with a GPU: ``make gpu`` runs them, each step in a process of its own."""
