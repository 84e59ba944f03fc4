"""This host in the network: its addresses, and the sockets on which its programs listen."""
