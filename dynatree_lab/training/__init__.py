"""Training of draft models and EAGLE heads.

distil          trains a draft model or an EAGLE head for a target on text
draft_training  the training of a draft model
eagle_training  the training of an EAGLE head
own_text        text that a target writes itself, for the training of a head
loop            the training loop of both, which can be resumed
batches         batches of sequences on the layers of gpt_neox.py
"""
