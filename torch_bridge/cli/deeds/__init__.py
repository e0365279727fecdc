"""What commands do that train nothing, each imported when its command runs.

`bridge_run`, `checkpoint_run` (`convert`, `inspect`), `generate_run`, `merge_run`,
`preflight_run`.
"""
