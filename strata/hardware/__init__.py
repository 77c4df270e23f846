"""What machines can do: the device database, the roofline and honest clocks. Imports no other floor."""
