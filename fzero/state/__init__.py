"""The training state, and all that makes another state of one."""
