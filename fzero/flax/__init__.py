"""flax modules as models (`models`; fzero works without flax).

Those of nnx are taken apart and put together for a call (`nnx_modules`), which may write nothing
but variables (`nnx_calls`): neither parameters nor values of Python (`python_state`).
"""
