"""Transfer of weights into the servers, and its verification."""
