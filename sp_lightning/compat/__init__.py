"""Code that depends on the versions of torch and CPython: reference counts."""
