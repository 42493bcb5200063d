"""What a cluster without pdlab needs: pdlab's code as one zip, and the manifests of a KubeRay RayService."""
