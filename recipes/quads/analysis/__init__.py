"""Where the difference between the rollout's and the actor's logprobs comes from.

`legs`, `sites`, `masks`, `emulation`, `decompose` are shared by the probe in training and by `quads diagnose`; they
import neither vLLM nor verl.
"""
