"""All that depends on the versions of torch, Lightning and CPython: private names."""
