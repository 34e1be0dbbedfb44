"""HTTP requests, proxies and keys, and the addresses, interfaces and stores of a job."""
