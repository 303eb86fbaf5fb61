"""The process that serves a replica over Thrift and HTTP."""
