"""The optimizer step on the host: in pieces, in backward, and deferred beside the next forward."""
