"""Names of torchvision that transformers imports while vLLM-Ascend patches vision models.

torchvision has no build that loads beside a CPU build of torch 2.13; no test here calls it.
"""
