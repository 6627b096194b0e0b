"""Two traces laid side by side: where they part, by how much, and whether it matters."""
