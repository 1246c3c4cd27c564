"""The live view of a run: the same dashboard while training and in `turnwise watch`. Text from runs
is untrusted: everything shown passes `text.clean`."""
