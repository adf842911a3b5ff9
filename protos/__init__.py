"""Meaning on the wire: the two .proto files, their generated code, and the step as numpy columns."""
