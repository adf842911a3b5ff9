"""The arithmetic: every reduction a fixed expression over global positions, each fast form with its plain twin."""
