"""The demo's policy: its tokenizer, its task, how it is trained, and its outlier variant."""
