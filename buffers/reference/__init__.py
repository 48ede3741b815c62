"""The buffer's contract as one plain Python state machine. Each file stands beside the script of the same name in
`buffers/scripts/`; `Model` in `model.py` is the whole."""
