"""Fast paths, in C and in generated Python: binding, guards, outputs and the generated source."""
