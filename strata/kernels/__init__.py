"""One operation per file: what it computes, its reference, its cost, its fast kernels. Imports only `hardware`."""
