"""What a step reads and writes of the state of its sequences: pages, block tables, newest ids."""
