"""One engine over several nodes: docs/guides/nodes.md.

launchers   who started us: the place among the nodes, from the environment
meeting     node 0's address and the secret, over MPI once (mpi_exchange) or from the environment
link        the encrypted connection between the supervisors
leader      node 0: knows the nodes, spreads the ranks over them
lender      the other nodes: run ranks for node 0
"""
