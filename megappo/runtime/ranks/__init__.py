"""Communication between ranks: rendezvous, process groups and collectives."""
