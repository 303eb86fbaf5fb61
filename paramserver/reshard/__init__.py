"""A new server, built aside of the rows and logs of another one that runs, or that has left them."""
