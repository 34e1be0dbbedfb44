"""Requests to the servers: assignment, HTTP calls and answers."""
