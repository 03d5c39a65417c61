"""Ports and services of the application."""
