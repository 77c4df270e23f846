"""Several engines that serve the same model, behind one client."""
