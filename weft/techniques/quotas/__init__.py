"""Quota controllers, which divide a device between prompts and writing while both run, one file each."""
