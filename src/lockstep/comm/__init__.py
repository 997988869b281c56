"""Bytes between workers."""
