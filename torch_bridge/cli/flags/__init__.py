"""What a command is asked: flags, a run's file, and the settings that both become.

- `options`: of several commands, each declared once, shown under `headings`.
- `run_flags` puts a run together from flags and `plan_file`, which reads a run's file.
- Frozen data: `settings`, `tuning_settings` (documents and adapters), `preflight_settings`.
"""
