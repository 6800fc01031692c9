"""Tests of the documentation: its pages, its pictures, and what makes the site."""
