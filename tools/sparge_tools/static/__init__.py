"""What can be known of the GPU kernels without a GPU: they are compiled for it, and the machine
code is read. Nothing here is a measurement, and nothing here runs a kernel."""
