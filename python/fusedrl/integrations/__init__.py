"""Other libraries made to run on the fused ops: a file a library, loaded when it is asked for."""
