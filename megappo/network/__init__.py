"""HTTP requests and proxies."""
