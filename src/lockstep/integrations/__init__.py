"""Lockstep within other libraries, each imported by who uses it: `lockstep.integrations.lightning`, and so on."""
