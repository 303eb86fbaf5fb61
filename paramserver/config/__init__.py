"""What a server can be told, and the directory that it keeps."""
