"""The optimizer's step in C++: its source, how it is compiled, and how it is found and loaded."""
