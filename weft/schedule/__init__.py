"""Schedules as tables: built, validated, lowered, simulated, drawn and executed."""
