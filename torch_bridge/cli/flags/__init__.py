"""What a command is asked: flags, and the settings that they become.

- `options`: of several commands, each declared once, shown under `headings`.
- `run_flags` puts a run together from flags and a run's file; `preflight_settings` are preflight's.
"""
