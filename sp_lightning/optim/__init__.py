"""The optimizer's step on the host: in pieces, beside backward, beside the next forward."""
