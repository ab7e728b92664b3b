"""The paper's family of networks, one file each."""
