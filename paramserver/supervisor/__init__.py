"""The supervisor: the processes of a server, and the command that starts them."""
