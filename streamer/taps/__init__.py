"""Hooks that learn which rows the optimizer has changed; all run on the training thread unless they say otherwise."""
