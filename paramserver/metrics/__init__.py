"""What is seen of a running server: metrics, status, problems and the page that shows them."""
