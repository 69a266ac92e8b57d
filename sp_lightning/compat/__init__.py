"""What depends on the versions of torch and CPython: private names and reference counts."""
