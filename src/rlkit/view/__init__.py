"""Page that shows runs: what is recorded, as JSON, and the server of the page."""
